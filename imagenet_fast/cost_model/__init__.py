"""What devices and networks can do, and the time that work takes on them; without TensorFlow."""
