"""The model of images of a composite: its tower, the hook that puts its features into a chunk, and their checks."""
