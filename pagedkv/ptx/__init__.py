"""The kernels without a GPU: NVRTC compiles them to PTX, and NumPy runs the PTX, one array element per CUDA thread.

``parse`` turns text into instructions that ``opcodes`` knows, ``machine`` schedules them over all threads of a grid at
once, ``memory`` holds global, shared and local memory and looks at every access. What instructions do is in
``arithmetic``, ``moves``, ``warp``, ``tensor`` (with ``dot``), ``atomics`` and ``async_copy``; ``operands`` says how
they take a register's bits.
"""
