"""Training jobs at SageMaker."""
