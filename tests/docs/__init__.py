"""What stands in README, changelog and docs is checked: ``python -m tests.docs``, or ``make docs``.

- Links lead somewhere: files, folders, headings. Addresses elsewhere are looked at, not visited.
- Names exist: options of ``hcache`` and SGLang, our configuration and its defaults, environment
  variables, metrics and their labels, files of this repository, targets of the Makefile.
- Blocks that are marked ``runnable`` run. ``sh runnable`` has to end with status 0;
  ``console runnable`` also has to print what stands there.
"""
