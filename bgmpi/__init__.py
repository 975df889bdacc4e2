"""Batch inference for mixture-of-experts models: sequence coroutines over MPI, results in HDF5.

Only the version lives here, so that `import bgmpi` costs nothing and reaches no device.
"""

__version__ = "0.1.0"
