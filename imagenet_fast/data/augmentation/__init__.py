"""Random crops, flips and colors of training images."""
