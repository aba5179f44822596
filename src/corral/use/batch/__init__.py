"""Many rows through a model, nothing lost: the resumable core, and on top of it `corral batch`.

The core is generic: anything that turns rows into requests and replies into one line per row can use it
(`corral batch` does, `corral score` may). Its promise: at-least-once execution, exactly one line per row; a line
counts once it is synced; after any crash the same call continues.

    from corral.use.batch import BatchFolder, BatchLock, FixedServer, RowAsk, RowRequest, Table, hash64, run_job

    folder = BatchFolder(output=Path("scores.jsonl"))         # live=False: lines go to folder.results, and you make
    folder.create()                                         # the output from them at the end (`output.export`)
    with BatchLock(folder.lock, str(folder.output)) as lock:  # ConflictError names the holder; stale locks are taken
        table = Table(data=Path("items.jsonl"))             # where rows can be read again, by offset
        table.add(hash64(id), hash64(raw), offset, len(raw), line)      # once per row; 33 bytes each
        summary = run_job(folder, table, work, [FixedServer(endpoint)], lock=lock, listener=listener)

`work` is any object with three methods (`Work`):

    ask(number, raw) -> RowAsk(requests=[RowRequest(path, body), …], context)   # several requests may make one row
    result(number, context, replies) -> bytes                             # its one line, with "
"
    failure(number, raw, error) -> bytes                                  # its line in folder.errors

`Table.save` and `Table.load` keep the table, so that a resume need not read the input again; `Ledger.open` inside
`run_job` compares id and content hashes of what is done with the table and drops what changed. Comparing parameters
and model with those of the first run is the caller's part (`job` does it for batch). `run_job` handles retries,
endpoint loss and moves (`ModelServer.find`), adaptive concurrency per endpoint, signals (drain), cancel files and a
full disk. `check.scan` reads every input format into a Table.

Programs say `corral.batch(…)` (`use/batch/batch.py`). Python gives that name to this package, so the package is
callable.
"""
