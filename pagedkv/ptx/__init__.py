"""The kernels without a GPU: NVRTC compiles them to PTX, and NumPy runs the PTX, one array element per CUDA thread.

``parse`` turns text into instructions that ``opcodes`` knows. ``machine`` runs them over all threads of a grid at once,
those whose turn it is by ``schedule``. What instructions do is in ``arithmetic``, ``moves``, ``warp``, ``barriers``,
``atomics`` and ``async_copy``; ``operands`` says how they take a register's bits.

``global_memory``, ``shared_memory`` and ``local_memory`` look at every access; ``pages`` has buffers of any size that
hold only what is touched. ``cta_order`` and ``releases`` know which accesses are ordered, inside a CTA and by fences,
atomics and flags; ``grid_races`` finds those of different CTAs that are not.
"""
