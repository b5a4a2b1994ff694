"""How a training scales: measured on several numbers of workers, told in tables, predicted."""
