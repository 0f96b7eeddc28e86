"""The kernels without a GPU: NVRTC compiles them to PTX, and NumPy runs the PTX, one array element per CUDA thread.

``parse`` turns text into instructions, ``machine`` schedules them over all threads of a grid at once, ``memory`` holds
global, shared and parameter memory and looks at every access, ``arithmetic`` and ``warp`` are what instructions do.
"""
