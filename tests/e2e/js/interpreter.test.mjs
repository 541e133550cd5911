// The `@e2b/code-interpreter` package, as it is published.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox } from '@e2b/code-interpreter'
import { maker } from './harness.mjs'

const shared = maker(Sandbox, 'code-interpreter-v1')()

test('state stays between calls', async () => {
  const sandbox = await shared
  await sandbox.runCode('x = 6')
  assert.equal((await sandbox.runCode('x * 7')).text, '42')
})

test('output streams', async () => {
  const sandbox = await shared
  const out = []
  const err = []
  const execution = await sandbox.runCode("import sys\nprint('a')\nprint('b', file=sys.stderr)", {
    onStdout: (message) => out.push(message.line),
    onStderr: (message) => err.push(message.line),
  })
  assert.equal(out.join(''), 'a\n')
  assert.equal(err.join(''), 'b\n')
  assert.equal(execution.error, undefined)
})

test('an error is a value', async () => {
  const sandbox = await shared
  const { error } = await sandbox.runCode('1/0')
  assert.equal(error.name, 'ZeroDivisionError')
  assert.match(error.traceback, /1\/0/)
})

test('a chart comes as a picture and as data', async () => {
  const sandbox = await shared
  const code = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2]); plt.show()"
  const { results } = await sandbox.runCode(code)
  assert.ok(results[0].png)
  assert.equal(results[0].chart.type, 'bar')
  assert.deepEqual(results[0].chart.elements.map((e) => e.label), ['a', 'b'])
})

test('JavaScript, TypeScript and bash', async () => {
  const sandbox = await shared
  assert.match((await sandbox.runCode('20 + 22', { language: 'js' })).text, /42/)
  const typed = await sandbox.runCode('const n: number = 41; n + 1', { language: 'ts' })
  assert.match(typed.text, /42/)
  const shell = await sandbox.runCode('echo 42', { language: 'bash' })
  assert.match(shell.logs.stdout.join(''), /42/)
})

test('contexts are apart', async () => {
  const sandbox = await shared
  const context = await sandbox.createCodeContext({ cwd: '/tmp' })
  await sandbox.runCode('mark = 1', { context })
  assert.equal((await sandbox.runCode('mark', { context })).text, '1')
  assert.equal((await sandbox.runCode('mark')).error.name, 'NameError')
  assert.ok((await sandbox.listCodeContexts()).some((c) => c.id === context.id))
  await sandbox.removeCodeContext(context)
})

test('environment of one call', async () => {
  const sandbox = await shared
  const code = "import os; os.environ.get('ONCE')"
  assert.equal((await sandbox.runCode(code, { envs: { ONCE: 'yes' } })).text, 'yes')
})

test('BC-048 a giant result', async () => {
  const sandbox = await shared
  try {
    await sandbox.runCode("'z'*60_000_000")
  } catch (limit) {
    assert.ok(limit instanceof Error)
  }
  assert.equal((await sandbox.runCode('6*7')).text, '42')
})
