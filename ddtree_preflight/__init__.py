# SPDX-License-Identifier: Apache-2.0
"""What would keep a host from serving, found before anything is changed.

Runs on any Python from 3.9 and imports nothing but the standard library. It only reads. Every check
looks at one thing and yields findings; none ends the others, so that an operator sees all of them
at once. `checks.run` is the entry point, `request` what is asked of the host, `host` how it is read.
"""
