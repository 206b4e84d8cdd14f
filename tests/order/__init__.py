"""A happens-before checker: wrong orders between CUDA streams, found on a machine without a GPU.

Streams become vector clocks. All work runs at once and in program order on the CPU, so nothing
races here; but every access to memory that a GPU's stream would touch is held against the clocks
of the accesses before it. What no event, no wait and no look of the host puts in an order is
reported: the two places, their streams, and the edge that is missing.

- ``clocks``: the host and the streams, what each is ordered behind, and where the host waits;
- ``memory``: who touched which bytes last, and how long memory lives (a caching allocator hands a
  block out again in the order of the stream that it was made on, unless somebody kept it);
- ``accesses``: which bytes a torch operation reads and writes;
- ``stand_ins``: streams and events in the place of ``torch.cpu``'s;
- ``watch``: what a thread asks of torch, and the ways between host and device;
- ``product``: the same for :mod:`hcache_backend.streams`;
- ``rules``: what is not reported, each with its reason;
- ``edges``, ``reports``: every place of the product that orders streams, and what is reported when
  it is left out;
- ``graphs``: decode graphs of SGLang, replayed without the product's Python;
- ``plugin``: puts all of it into the scheduler of a real SGLang server;
- ``waits``: where the host waited in there.

What a checker of this kind must not leave out, because bugs hide behind it: queries that say no for
a while (``Query.LAZY``), SGLang's read barrier published as early as its decode graphs do it, an
allocator that hands out first what was freed last, and the host's own accesses to pinned memory.
"""
