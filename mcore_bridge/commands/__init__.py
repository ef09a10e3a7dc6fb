"""What the command line does. It may import the whole library, which never imports it."""
