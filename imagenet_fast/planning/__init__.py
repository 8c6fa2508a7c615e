"""Cost models: what training takes and costs, worked out. Nothing here imports TensorFlow."""
