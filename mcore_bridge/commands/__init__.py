"""The commands of the command line. They may import the whole library, and the library never imports them."""
