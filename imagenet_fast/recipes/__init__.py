"""Published training runs, each a flagfile that ``--flagfile=NAME`` finds by its name.

A recipe's header gives its source, its commands, the hardware, and what to expect.
"""
