"""Each way of combining the workers' gradients, put into a training."""
