"""The kernels without a GPU: NVRTC compiles them to PTX, and NumPy runs the PTX, one array element per CUDA thread.

``parse`` turns text into instructions that ``opcodes`` knows, ``machine`` schedules them over all threads of a grid at
once, ``memory`` holds global, shared and local memory and looks at every access. What instructions do is in
``arithmetic``, ``halves``, ``bits`` and ``conversions``, all found by ``instructions``, and in ``moves``, ``atomics``,
``async_copy``, ``warp``, ``collectives`` and ``tensor``, which adds as ``dot`` says. ``rounding`` has what NumPy lacks;
``operands`` says how instructions take a register's bits.
"""
