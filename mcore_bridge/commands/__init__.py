"""What the command line does. Only here are processes started; nothing in the library imports this."""
