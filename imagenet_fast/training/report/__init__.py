"""What a run shows: ``report.html``, its charts and images, and what TensorBoard gets of them."""
