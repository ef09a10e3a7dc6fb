"""The interfaces of other bridges, as trainers call them, implemented with this library. It imports all but
``commands``.
"""
