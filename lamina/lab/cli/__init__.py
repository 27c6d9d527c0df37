"""The ``lamina`` command. Nothing else imports it."""
