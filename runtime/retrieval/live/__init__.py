"""Live collections: documents are upserted and deleted while they are searched, as in an LSM tree.

    collection.json               immutable description (`storage.manifest.Description`)
    MANIFEST                      sealed segments, and the log position behind them (`storage.manifest.Manifest`)
    log/<first sequence>.log      write-ahead log of upserts and deletes, which acknowledges them (`storage.log`)
    segments/<number>/            sealed: an index with row numbers as ids, documents, attributes (`storage.segment`)
    tombstones/<generation>.npy   int64, the deleted rows of the manifest's sealed segments
    writer.lock                   lock of the only writing process

A document gets a row number when it is stored; row numbers are never reused. An upsert of an existing id stores the
document under a new row and deletes the old one. A row number therefore denotes one text permanently, and a result
cannot mix texts.
"""
