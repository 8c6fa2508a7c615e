"""Exported models, as SavedModels, ONNX and TFLite files, and predictions with them."""
