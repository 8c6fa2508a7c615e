"""Random crops, flips and colours of training images."""
