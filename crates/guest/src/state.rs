//! What the sandbox is at present: its token, its variables, its ids, its defaults.
//!
//! Owned by the app, changed only by `/init`, read by every request. All of it is replaced at
//! once, so no request sees half of an old life and half of a new one.
//!
//! Invariant: `access_token` is `None` until the first `/init` after a start; then every
//! data-plane call is refused.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
};

use sandhold_types::{Clock, Token};

use crate::{
    account::{Account, AccountError, Accounts},
    config::AgentConfig,
};

/// One life of the sandbox, from an `/init` to the next.
#[derive(Debug, Clone)]
pub struct Life {
    /// What data-plane calls must present.
    pub access_token: Option<Token>,
    /// What control calls must present.
    pub control_token: Option<Token>,
    /// The variables of `/init`.
    pub variables: BTreeMap<String, String>,
    /// Who runs what names nobody.
    pub default_user: String,
    /// Where commands run that name no directory; the home of the user if absent.
    pub default_workdir: Option<PathBuf>,
    /// This sandbox's id, once known.
    pub sandbox_id: Option<String>,
    /// The template it came from, once known.
    pub template_id: Option<String>,
}

/// The shared state of the agent.
#[derive(Debug)]
pub struct SandboxState {
    life: RwLock<Arc<Life>>,
    /// Variables of the template, beneath those of `/init`.
    environment: BTreeMap<String, String>,
    /// The users of the sandbox.
    pub accounts: Accounts,
    /// The sandbox's time.
    pub clock: Arc<dyn Clock>,
}

impl SandboxState {
    /// The state before the first `/init`.
    #[must_use]
    pub fn new(config: &AgentConfig, clock: Arc<dyn Clock>) -> Self {
        let life = Life {
            access_token: None,
            control_token: config.control_token.clone(),
            variables: BTreeMap::new(),
            default_user: config.default_user.clone(),
            default_workdir: config.default_workdir.clone(),
            sandbox_id: None,
            template_id: None,
        };
        Self {
            life: RwLock::new(Arc::new(life)),
            environment: config.environment.clone(),
            accounts: Accounts::in_dir(&config.etc_dir),
            clock,
        }
    }

    /// The present life; later changes do not touch what is returned.
    #[must_use]
    pub fn life(&self) -> Arc<Life> {
        Arc::clone(&self.life.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the present life.
    pub fn begin_life(&self, life: Life) {
        *self.life.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(life);
    }

    /// The sandbox-wide variables: the template's, those of `/init` over them, and the ones that
    /// E2B promises. What `GET /envs` shows.
    #[must_use]
    pub fn variables(&self) -> BTreeMap<String, String> {
        let life = self.life();
        let mut variables = self.environment.clone();
        variables.extend(life.variables.clone());
        variables.insert(String::from("E2B_SANDBOX"), String::from("true"));
        if let Some(id) = &life.sandbox_id {
            variables.insert(String::from("E2B_SANDBOX_ID"), id.clone());
        }
        if let Some(id) = &life.template_id {
            variables.insert(String::from("E2B_TEMPLATE_ID"), id.clone());
        }
        variables
    }

    /// The complete environment of a process of this user: the variables of a login, the
    /// sandbox's over them.
    #[must_use]
    pub fn process_environment(&self, account: &Account) -> BTreeMap<String, String> {
        Self::environment_of(account, self.variables())
    }

    /// The environment of a process of the template: without the variables of any sandbox (BC-087).
    #[must_use]
    pub fn template_environment(&self, account: &Account) -> BTreeMap<String, String> {
        let mut variables = self.environment.clone();
        variables.insert(String::from("E2B_SANDBOX"), String::from("true"));
        Self::environment_of(account, variables)
    }

    fn environment_of(
        account: &Account,
        variables: BTreeMap<String, String>,
    ) -> BTreeMap<String, String> {
        let path = |path: &std::path::Path| path.to_string_lossy().into_owned();
        let mut environment = BTreeMap::from([
            (String::from("HOME"), path(&account.home)),
            (String::from("USER"), account.name.clone()),
            (String::from("LOGNAME"), account.name.clone()),
            (String::from("SHELL"), path(&account.shell)),
            (String::from("PATH"), String::from(DEFAULT_PATH)),
        ]);
        environment.extend(variables);
        environment
    }

    /// Where a process of this user runs, unless the caller says: the sandbox's directory, else
    /// the user's home.
    #[must_use]
    pub fn workdir(&self, account: &Account) -> PathBuf {
        let workdir = self.life().default_workdir.clone();
        workdir.unwrap_or_else(|| account.home.clone())
    }

    /// The named user, or the default one.
    ///
    /// # Errors
    /// Nobody has that name.
    pub fn account(&self, name: Option<&str>) -> Result<Account, AccountError> {
        match name {
            Some(name) => self.accounts.find(name),
            None => self.accounts.find(&self.life().default_user),
        }
    }
}

/// Where programs are looked for, unless a variable says otherwise.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
