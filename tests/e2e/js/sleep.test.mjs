// Sleep and waking with the JavaScript SDKs (R-L4, R-L6, R-L7).
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox } from '@e2b/code-interpreter'
import { eventually, maker } from './harness.mjs'

const make = maker(Sandbox, 'code-interpreter-v1')
const SLEEPS = { onTimeout: 'pause', autoResume: true }

async function state(sandbox) {
  const answer = await fetch(`${process.env.SANDHOLD_URL}/sandboxes/${sandbox.sandboxId}`, {
    headers: { 'X-API-Key': process.env.E2B_API_KEY },
  })
  return (await answer.json()).state
}

test('what ran goes on after pause and connect', async () => {
  const sandbox = await make()
  await sandbox.runCode('x = 41')
  assert.equal(await sandbox.pause(), true)
  assert.equal(await sandbox.pause(), false)
  assert.equal(await state(sandbox), 'paused')
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 60_000 })
  assert.equal((await again.runCode('x + 1')).text, '42')
})

test('a short timeout puts to sleep, and code, a file and a command wake', async () => {
  const sandbox = await make({ timeoutMs: 3_000, lifecycle: SLEEPS })
  await sandbox.runCode('x = 6')
  await sandbox.files.write('/tmp/f', 'before')
  await eventually(async () => (await state(sandbox)) === 'paused', 30_000)
  assert.equal((await sandbox.runCode('x * 7')).text, '42')
  await sandbox.pause()
  assert.equal(await sandbox.files.read('/tmp/f'), 'before')
  await sandbox.pause()
  assert.equal((await sandbox.commands.run('echo awake')).stdout, 'awake\n')
})
