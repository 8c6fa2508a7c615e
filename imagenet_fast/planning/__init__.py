"""The published systems as data. Nothing here imports TensorFlow."""
