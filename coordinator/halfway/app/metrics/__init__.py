"""What Prometheus reads: the metrics of a coordinator, and the instruments behind them."""
