"""Interfaces for trainers: the interfaces of other bridges, implemented with this library. It imports all but
``commands``.
"""
