// The `e2b` package, as it is published.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import {
  AuthenticationError,
  CommandExitError,
  FileNotFoundError,
  FilesystemEventType,
  Sandbox,
  SandboxNotFoundError,
} from 'e2b'
import { eventually, maker } from './harness.mjs'

const create = maker(Sandbox, 'base')
const shared = create({ metadata: { by: 'js' } })

async function pages(paginator) {
  const items = []
  while (paginator.hasNext) items.push(...(await paginator.nextItems()))
  return items
}

test('a sandbox lives, is told about and ends', async () => {
  const mark = String(Math.random())
  const sandbox = await create({ metadata: { mark }, envs: { COLOUR: 'teal' } })
  assert.equal(await sandbox.isRunning(), true)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.deepEqual(info.metadata, { mark })
  const found = await pages(Sandbox.list({ query: { metadata: { mark } } }))
  assert.deepEqual(found.map((item) => item.sandboxId), [sandbox.sandboxId])
  assert.equal((await sandbox.commands.run('echo $COLOUR')).stdout, 'teal\n')
  await sandbox.setTimeout(600_000)
  const { endAt } = await sandbox.getInfo()
  assert.ok(endAt.getTime() - Date.now() > 500_000)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo x')).stdout, 'x\n')
  assert.equal(await sandbox.kill(), true)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(Sandbox.connect(sandbox.sandboxId), SandboxNotFoundError)
})

test('a page at a time, each once', async () => {
  const mark = String(Math.random())
  const made = await Promise.all([1, 2, 3].map(() => create({ metadata: { mark } })))
  const seen = await pages(Sandbox.list({ query: { metadata: { mark } }, limit: 1 }))
  assert.deepEqual(seen.map((s) => s.sandboxId).sort(), made.map((s) => s.sandboxId).sort())
})

test('a wrong key is refused', async () => {
  await assert.rejects(Sandbox.create('base', { apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
})

test('metrics are sampled', async () => {
  const sandbox = await shared
  const samples = await eventually(async () => {
    const all = await sandbox.getMetrics()
    return all.length > 0 && all
  }, 30_000)
  assert.ok(samples[0].memTotal > 0)
})

test('commands in front: output, exit code, user, directory, environment', async () => {
  const { commands } = await shared
  const result = await commands.run('echo out; echo err >&2')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
  await assert.rejects(commands.run('exit 7'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.equal(error.exitCode, 7)
    return true
  })
  assert.equal((await commands.run('id -un', { user: 'root' })).stdout, 'root\n')
  assert.equal((await commands.run('pwd', { cwd: '/usr' })).stdout, '/usr\n')
  const envs = { A: 'two words', B: 'x"y$HOME`', C: 'l1\nl2', E: '日本', F: '' }
  const seen = (await commands.run('env -0', { envs })).stdout.split('\0')
  for (const [name, value] of Object.entries(envs)) assert.ok(seen.includes(`${name}=${value}`), name)
})

test('commands behind: stdin, list, kill, connect', async () => {
  const { commands } = await shared
  const cat = await commands.run('cat; echo over', { background: true, stdin: true })
  await commands.sendStdin(cat.pid, 'in ü\n')
  await commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'in ü\nover\n')
  const sleeper = await commands.run('sleep 300', { background: true })
  assert.ok((await commands.list()).some((p) => p.pid === sleeper.pid))
  assert.equal(await sleeper.kill(), true)
  await assert.rejects(sleeper.wait())
  const short = await commands.run('sleep 0.3; echo done', { background: true })
  await short.disconnect()
  assert.match((await (await commands.connect(short.pid)).wait()).stdout, /done/)
})

test('BC-002 bytes that are not text end a stream in good order', async () => {
  const { commands } = await shared
  assert.equal((await commands.run('head -c 70000 /dev/urandom')).exitCode, 0)
})

test('a command that runs over its time is ended', async () => {
  const { commands } = await shared
  await assert.rejects(commands.run('sleep 299', { timeoutMs: 500 }))
  await eventually(async () => !(await commands.list()).some((p) => p.args.includes('sleep 299')))
})

test('a terminal', async () => {
  const { pty } = await shared
  let output = ''
  const decoder = new TextDecoder()
  const terminal = await pty.create({
    cols: 99,
    rows: 33,
    timeoutMs: 0,
    onData: (data) => (output += decoder.decode(data)),
  })
  const type = (text) => pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  await type('stty size\n')
  await eventually(() => output.includes('33 99'))
  await pty.resize(terminal.pid, { cols: 140, rows: 50 })
  await type('stty size\n')
  await eventually(() => output.includes('50 140'))
  assert.equal(await pty.kill(terminal.pid), true)
})

test('files of every form', async () => {
  const { files } = await shared
  const bytes = new Uint8Array([0xff, 0xd8, 0x89, 0x50, 0, 0x0a, 0x0d, 0x1a])
  await files.write('js/text', 'grüße')
  await files.write('js/bytes', bytes.buffer)
  await files.write('js/blob', new Blob([bytes]))
  await files.write('js/empty', '')
  assert.equal(await files.read('js/text'), 'grüße')
  for (const name of ['js/bytes', 'js/blob']) {
    assert.deepEqual(await files.read(name, { format: 'bytes' }), bytes)
  }
  assert.equal(await files.read('js/empty'), '')
  const written = await files.write([
    { path: 'js/1', data: 'one' },
    { path: 'js/2', data: 'two' },
  ])
  assert.equal(written.length, 2)
  const names = (await files.list('js')).map((entry) => entry.name)
  assert.deepEqual(names.sort(), ['1', '2', 'blob', 'bytes', 'empty', 'text'])
  assert.equal((await files.getInfo('js/1')).size, 3)
  await files.rename('js/1', 'js/3')
  assert.equal(await files.exists('js/1'), false)
  assert.equal(await files.makeDir('js/dir'), true)
  assert.equal(await files.makeDir('js/dir'), false)
  await files.remove('js')
  await assert.rejects(files.read('js/text'), FileNotFoundError)
})

test('signed addresses', async () => {
  const sandbox = await shared
  await sandbox.files.write('/tmp/signed', 'signed')
  const url = await sandbox.downloadUrl('/tmp/signed', { useSignatureExpiration: 60 })
  assert.equal(await (await fetch(url)).text(), 'signed')
})

test('changes in a folder', async () => {
  const { files } = await shared
  await files.makeDir('/tmp/watched')
  const events = []
  const watch = await files.watchDir('/tmp/watched', (event) => events.push(event), { timeoutMs: 0 })
  await files.write('/tmp/watched/a', '1')
  await eventually(() => events.some((e) => e.name === 'a' && e.type === FilesystemEventType.WRITE))
  await watch.stop()
})

test('many at once', async () => {
  const { commands } = await shared
  const runs = Array.from({ length: 20 }, (_, i) => commands.run(`sleep 0.1; echo ${i}`))
  const results = await Promise.all(runs)
  assert.deepEqual(results.map((r) => r.stdout), results.map((_, i) => `${i}\n`))
})
