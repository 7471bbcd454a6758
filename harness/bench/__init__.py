"""``kdtree bench``: times of the project, every operation and whole steps, beside peers and ceilings.

It measures and reports; it never asserts a target. One job a module:

* ``command``   arguments, progress, JSON, exit status
* ``cases``     what is measured: operations at named shapes
* ``work``      bytes and flops of a case or a forward, from sizes alone
* ``operands``  tensors for a case, in as many copies as keep the caches cold
* ``turns``     in which order a case and its peers are measured, and when the machine rests
* ``clock``     medians and spreads, on the CPU and from a GPU's own record
* ``ceilings``  streaming read, matmul peak, empty graph node, one-launch read floor
* ``reading``   the fastest streaming read known for the CPU
* ``peers``, ``peers_cpu``, ``peers_cuda``  other libraries on the same shapes
* ``targets``   the ratios that this project aims at
* ``ops``, ``step``, ``project``  the three measurements
* ``plot``      share of the roofline per case, as SVG
* ``k26``       a model of K2.6's sizes with random weights
* ``tables``    the documents' tables, made from CUDA's record

Beside the command, each a program of its own: ``counters`` (Nsight Compute), ``timeline`` (what a launch costs),
``ranks`` (several GPUs; ``share`` is one rank's part alone), ``collectives`` (exchanges).
"""
