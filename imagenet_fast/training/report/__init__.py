"""The report of a run: ``report.html``, its charts and images, and TensorBoard's images."""
