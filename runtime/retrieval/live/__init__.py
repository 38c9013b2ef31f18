"""Live collections: documents come and go while they are searched.

    collection.json               what the collection is (`description`)
    MANIFEST                      its sealed segments, and where in the log what is not in them begins (`manifest`)
    log/<first sequence>.log      upserts and deletes, acknowledged once they are here (`log`)
    segments/<number>/            sealed: an index with row numbers as its ids, documents, attributes (`segment`)
    tombstones/<generation>.npy   int64, the deleted rows of sealed segments as of the manifest
    writer.lock                   locked by the one process that writes

A document gets a row number when it is stored, which no other one ever gets. An upsert of an id that is there gives it
a new row and deletes the old one. So a row number stands for one text for ever, and an answer cannot mix texts.
"""
