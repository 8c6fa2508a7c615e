"""Models of what devices and networks can do, and of how long work takes; without TensorFlow."""
