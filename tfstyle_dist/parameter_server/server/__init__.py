"""The process of one parameter server: a push goes through ``loop`` and ``batches`` to ``table``, which applies it."""
