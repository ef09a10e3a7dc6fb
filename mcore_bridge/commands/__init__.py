"""What the command line does. It imports the whole library, which never imports it."""
