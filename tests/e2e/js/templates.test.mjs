// Templates built by the JavaScript SDK (R-P5).
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, test } from 'node:test'
import { Sandbox, Template } from 'e2b'

const name = 'j' + randomUUID().replaceAll('-', '').slice(0, 12)
const remove = () =>
  fetch(`${process.env.SANDHOLD_URL}/templates/${name}`, {
    method: 'DELETE',
    headers: { 'X-API-KEY': process.env.SANDHOLD_API_KEY },
  })
after(remove)

test('a template with files, a cache hit, and a failing step', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'sandhold-js-'))
  writeFileSync(join(folder, 'one.txt'), 'one\n')
  const template = () =>
    Template({ fileContextPath: folder })
      .fromTemplate('base')
      .copy('one.txt', '/srv/one')
      .setEnvs({ COLOUR: 'teal' })
      .setWorkdir('/srv')
      .runCmd('echo $COLOUR > ~/made')
  const messages = []
  await Template.build(template(), name, { onBuildLogs: (entry) => messages.push(entry.message) })
  assert.ok(!messages.some((m) => m.startsWith('CACHED [')))
  const sandbox = await Sandbox.create(name, { timeoutMs: 120_000 })
  try {
    const { stdout } = await sandbox.commands.run('pwd; cat one ~/made')
    assert.equal(stdout, '/srv\none\nteal\n')
  } finally {
    await sandbox.kill()
  }
  messages.length = 0
  await Template.build(template(), name, { onBuildLogs: (entry) => messages.push(entry.message) })
  assert.equal(messages.filter((m) => m.startsWith('CACHED [')).length, 4, messages.join('\n'))

  await assert.rejects(Template.build(Template().fromTemplate('base').runCmd('exit 3'), name), (error) => {
    assert.match(error.message, /exit status 3/)
    assert.match(error.stack, /templates\.test\.mjs/)
    return true
  })
  assert.equal(await Template.exists(name), true)
  const tags = await Template.getTags(name)
  assert.deepEqual(tags.map((tag) => tag.tag), ['default'])
})
