// Snapshots and forks with the JavaScript SDK (R-T1, R-T2).
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox } from '@e2b/code-interpreter'
import { maker } from './harness.mjs'

const make = maker(Sandbox, 'code-interpreter-v1')

test('a snapshot is listed, made into a sandbox and deleted', async () => {
  const sandbox = await make()
  await sandbox.runCode('x = 41')
  const snapshot = await sandbox.createSnapshot()
  await sandbox.runCode('x = 0')
  const listed = await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems()
  assert.deepEqual(listed.map((item) => item.snapshotId), [snapshot.snapshotId])
  const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
  assert.equal((await copy.runCode('x + 1')).text, '42')
  await copy.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
})

test('forks begin where their source is', async () => {
  const sandbox = await make()
  await sandbox.runCode('x = 41')
  const forks = await sandbox.fork({ count: 2, timeoutMs: 60_000 })
  assert.equal(forks.length, 2)
  for (const fork of forks) {
    assert.equal((await fork.runCode('x + 1')).text, '42')
    await fork.kill()
  }
})
