"""Data: the global order of samples, batches on the device, data sets, batched augmentation."""
