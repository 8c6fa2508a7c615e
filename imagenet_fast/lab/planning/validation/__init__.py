"""Published training times and the cost model's predictions of them."""
