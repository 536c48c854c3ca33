"""Stands in, on PYTHONPATH, for the one CUDA call that TRL 1.16 makes with no GPU in sight.

trl/trainer/utils.py, get_peak_flops_per_device, asks for the device's name to look its speed up.
"""

try:
    import torch
except ImportError:  # some other Python that inherited the path
    pass
else:
    torch.cuda.get_device_name = lambda device=None: "cpu"
