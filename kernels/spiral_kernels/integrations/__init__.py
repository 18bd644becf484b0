"""spiral_kernels inside other trainers. Each module imports its trainer only when its functions are called."""
