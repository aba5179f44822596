"""Many rows through a model, nothing lost: a resumable core, and on top of it `corral batch` and `corral score`.

The core (`core`) is generic: a `Work` turns rows into requests and replies into one line per row. Its promise:
at-least-once execution, exactly one line per row; a line counts once it is synced; after any crash the same call
continues.

    folder = BatchFolder(Path("scores.jsonl"))                # core.folder
    folder.create()
    with BatchLock(folder.lock, str(folder.output)) as lock:  # ConflictError names the holder; stale locks are taken
        table = Table(Path("items.jsonl"))                    # core.table: rows that can be read again, by offset
        table.add(hash64(id), hash64(raw), offset, len(raw), line)  # once per row; 33 bytes each
        with whole_assignment(folder, table, lock, listener) as rows:  # core.run
            summary = run_assignment(lambda: [FixedServer(endpoint)], rows, work, RunnerSettings(), listener, True)

`work` is any object with the three methods of `core.runner.Work`:

    first_step(number, raw) -> RowStep(requests=[RowRequest(path, body), …], context)
    result(number, context, replies) -> bytes | RowStep     # the row's one line, with its line feed, or more requests
    failure(number, raw, error) -> bytes                    # the row's line in folder.errors

`input.check.scan` reads every input format into a Table. Opening the ledger compares the hashes of results with those
of the table and drops results of rows that changed. Comparing parameters and model with those of the first run is the
caller's part (`spec` does it for `corral batch`).

Programs call `corral.batch(…)` (`use/batch/batch.py`). Python gives that name to this package, so the package is
callable.
"""
