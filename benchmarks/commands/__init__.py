"""The benchmarks of ``agentrl bench``, each a module with ``HELP``, ``add_arguments(parser)`` and ``run(arguments, console)``.

What measures is imported by ``run``: the command line starts without torch.
"""
