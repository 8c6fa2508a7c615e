"""SavedModels that take encoded images and need nothing but TensorFlow."""
