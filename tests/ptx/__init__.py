"""An emulator of PTX: the code that Triton compiles for a GPU runs on the CPU, in NumPy.

Written from NVIDIA's PTX ISA manual. It knows the instructions that our kernels are compiled to;
every other one is an error that names it. Where the manual allows an error (division, square
roots, sums of tensor cores) the result is the exact one, rounded once. It does not know what ptxas
does, the memory model beyond barriers and waits, or how long anything takes.
"""
