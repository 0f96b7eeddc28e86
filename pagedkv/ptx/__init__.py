"""The kernels without a GPU: NVRTC compiles them to PTX, and NumPy runs the PTX, one array element per CUDA thread.

``parse`` turns text into instructions that ``opcodes`` knows. ``machine`` runs them over all threads of a grid at once,
those whose turn it is by ``schedule``. What instructions do is in ``arithmetic``, ``halves``, ``bits`` and
``conversions``, all found by ``instructions``, and in ``moves``, ``atomics``, ``async_copy``, ``warp``, ``barriers``,
``collectives`` and ``tensor``, which adds as ``dot`` says. ``rounding`` has what NumPy lacks; ``operands`` says how
instructions take a register's bits.

``global_memory``, ``shared_memory`` and ``local_memory`` look at every access, with what they share in ``memory``;
``pages`` has buffers of any size that hold only what is touched. ``cta_order`` and ``releases`` know which accesses are
ordered, inside a CTA and by fences, atomics and flags; ``grid_races`` finds those of different CTAs that are not.

``counters`` has what a launch asks of the hardware, with the stores that ``joining`` finds side by side; ``faults`` are
what is reported.
"""
