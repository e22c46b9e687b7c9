"""Engines in virtual time: one loop of events, devices whose steps take modelled or recorded times, and two kinds of
engines: evenflow's own scheduler, and a host engine's with our steering inside. No torch, no real clock.
"""
