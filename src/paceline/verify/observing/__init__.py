"""What a worker of `paceline verify` watches: data, models, optimizers, collectives, draws."""
