"""Trained models for use: SavedModels that take encoded images, and ONNX and TFLite files."""
