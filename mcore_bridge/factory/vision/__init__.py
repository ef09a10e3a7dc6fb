"""The images of a composite: its tower, the hook that adds features to a chunk, and checks of images."""
