"""The CUDA backend: `kernels/*.cu`, compiled at run time by NVRTC, on torch's tensors and stream."""
