"""The page of ``mmreplay view``: shows a buffer in a browser, also while it is written.

The page only reads. `api.Page` answers requests with values of its own, `app` serves
them over HTTP and is the one module that imports Starlette, `saved` writes the same
answers to files, and static/ holds what the browser runs.
"""
