"""The lab: experiments, data, training, runs, reports and the ``lamina`` command. The library never imports it."""
